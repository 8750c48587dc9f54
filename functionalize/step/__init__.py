"""`CapturedStep`: call, plan, agree, act; the programs that it keeps."""
