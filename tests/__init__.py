"""The tests: one module per module of ``functionalize`` and ``passes``, in the same folders."""
