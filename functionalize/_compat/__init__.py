"""Private names of torch, by subject: nothing else in `functionalize` and `passes` imports a name with an underscore.

Each function says which name it stands for and why the public ones do not do. Names were seen in torch 2.11 to 2.15,
unless a line says otherwise.
"""
