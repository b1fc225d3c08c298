"""The graders: each looks at a pair of answers in its own way."""
