"""Several ranks: SGLang's tensor and expert parallelism, with results that are equal to those of one rank to the bit."""
