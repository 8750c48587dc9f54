"""Scripts made from configs: what `functionalize plan hf:...`, `trainer:...` and `titan:...` plan."""
