"""LoRA adapters beside the network: read or made up, held in slots on the device, applied row by row."""
