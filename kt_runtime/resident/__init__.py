"""What trains and publishes inside the serving process. At the door:

server      messages in, answers out, turns
handlers    what each message of the training protocol does
scheduler   whose slice runs next, and until when
workers     threads for what needs a file
host        what the engine around it must offer
config      sizes and limits

`twin` is the model that is differentiated, `training` sessions and their calls, `publishing` adapter versions on their
way into the engine and onto the disk.
"""
