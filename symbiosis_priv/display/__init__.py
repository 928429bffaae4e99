"""What people look at: tables in a terminal (`terminal`) and small SVG pictures (`figures`)."""
