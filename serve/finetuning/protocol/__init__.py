"""What clients send and get: bodies of requests, rows of files, graders, objects of answers."""
