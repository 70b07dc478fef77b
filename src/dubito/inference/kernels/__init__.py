"""Kernels for posteriors that are common and so small that launching torch's own operations costs more than their work."""
