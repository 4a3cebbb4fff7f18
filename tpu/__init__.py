"""Planning for TPUs and launching on them."""
