"""Memory and threads of torch on the CPU."""
