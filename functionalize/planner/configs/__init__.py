"""Scripts made from configs: what `functionalize plan hf:...` and `trainer:...` plan."""
