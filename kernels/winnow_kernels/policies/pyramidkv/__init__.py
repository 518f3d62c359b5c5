"""PyramidKV: SnapKV with budgets that shrink from layer to layer."""
