"""`engine top`: a screen of a running server.

command.py   the command
server.py    the server's answers, over one connection
compute.py   two scrapes and the seconds between -> figures
figures.py   the classes of the figures
screen.py    figures -> lines
units.py     numbers as text
terminal.py  the terminal's screen and keys
"""
