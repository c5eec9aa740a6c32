"""`knockout.sampling` inside the engines: vLLM (both model runners) and transformers."""
