"""Files of weights: names, shapes, formats, and what fills a module's parameters. Knows no family."""
