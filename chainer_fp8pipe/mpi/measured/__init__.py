"""What is measured of links and clocks."""
