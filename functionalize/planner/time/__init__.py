"""Traffic, FLOPs and the modelled time of a step."""
