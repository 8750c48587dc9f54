"""`functionalize.plan`: a step planned at every point of a grid."""
