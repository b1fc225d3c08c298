"""The built-in ladder: small models of our own, the tasks they were trained on, and the script that trained them."""
