"""What the papers claim (`registry`), our value of it (`reading`, `filters`), and how it is judged (`verdict`)."""
