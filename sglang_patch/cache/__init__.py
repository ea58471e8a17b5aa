"""SGLang's prefix cache: kt-runtime's disk tier behind it, its keys, pages and counters."""
