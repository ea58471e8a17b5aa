"""What `kt-runtime serve` is asked for: own options, SGLang's, those that peers' users type."""
