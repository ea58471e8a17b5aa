"""The options of `kt-runtime serve`: its own, SGLang's, and aliases from SGLang, vLLM and KTransformers."""
