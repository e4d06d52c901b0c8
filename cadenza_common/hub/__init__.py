"""Models of the Hugging Face hub, by the names that people type; huggingface-hub transfers, caches and scans."""
