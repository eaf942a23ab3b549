"""What is put in front of Chainer's own functions while a program runs."""
