"""Workflow files of ComfyUI: read, reduced to what reaches an output, and translated to requests."""
