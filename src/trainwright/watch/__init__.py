"""Samples of GPUs, host and ranks while a run goes on; alerts; the terminal and the web page that show them."""
