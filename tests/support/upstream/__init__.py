"""vLLM's own tests of its connectors, with kvass beside the connector of each test."""
