"""`CapturedStep`: replay, or record, judge, build, agree; the programs that it keeps."""
