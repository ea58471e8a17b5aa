"""Training and publishing inside the serving process. The top modules:

server      receives requests, sends replies, runs the turns between the engine's batches
handlers    one handler for each request about a training session
scheduler   decides which session's slice runs next, and when a turn ends
workers     worker threads for file access and other long work
host        the interface that the serving engine implements
config      sizes and limits

`twin` is the model that is differentiated, `training` has sessions and their calls, `publishing` installs adapter
versions in the engine and stores them on disk.
"""
