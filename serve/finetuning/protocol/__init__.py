"""What clients send: bodies of requests, rows of files, graders."""
