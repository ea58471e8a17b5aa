"""SGLang on an accelerator: what its captured graphs and the experts in host memory need of each other."""
