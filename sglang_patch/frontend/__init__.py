"""SGLang's HTTP process: startup, tokenization, request checks, log-probabilities."""
