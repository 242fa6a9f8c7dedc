"""From records to what people see: figures, notebooks, the HTML report."""
