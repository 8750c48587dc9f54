"""What any folder may use: stacks of the user's code, structures, text, and how attributes are replaced for a time."""
