"""Write pages: file, folder and index pages as Markdown and HTML, their links, and the search index."""
