"""Equal layers of a model: a step that was recorded whole once is recorded with few of them from then on."""
