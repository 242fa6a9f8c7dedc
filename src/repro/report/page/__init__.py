"""What the report's page is made of: its templates, style and script; its pictures with their texts; its links."""
