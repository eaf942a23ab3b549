"""Replaces functions of Chainer while a program needs others."""
