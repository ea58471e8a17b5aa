"""Gated DeltaNet layers on a CPU: SGLang's modules and state pools with kt-runtime's operations."""
