"""Ada-SnapKV: SnapKV whose KV heads share a layer's budget."""
