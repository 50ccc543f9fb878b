"""What tensors are stored in: zip archives, torch files, safetensors files, JSON manifests. No tensor names a layout here."""
