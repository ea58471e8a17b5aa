"""SGLang's prefix cache: its disk tier by kt-runtime, keys, pages and counters."""
