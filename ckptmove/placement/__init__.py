"""Who goes where: rules, and the moves that follow from them."""
