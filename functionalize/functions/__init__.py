"""Functions of tensors: `trace`, `functionalize_storage`, `aot_function` and the `torch.compile` backends."""
