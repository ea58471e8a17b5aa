"""Several ranks: SGLang's tensor and expert parallelism, with results that equal those of one rank to the bit."""
