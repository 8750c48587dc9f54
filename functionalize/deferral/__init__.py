"""`fz.lazy`: ops inside a `with` block wait, and run as one program when somebody looks at what they compute."""
