"""Graph passes on `onnx_ir`, one pass a file."""
