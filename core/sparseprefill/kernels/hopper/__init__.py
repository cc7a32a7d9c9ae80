"""The attention kernel of capability 9.0, warp-specialised in Gluon: a scheduler, a producer and two consumers."""
