"""SGLang's HTTP process: start, tokenizing, requests, log-probabilities."""
