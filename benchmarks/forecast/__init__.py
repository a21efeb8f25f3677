"""Forecasts of scaling, compared with simulations of SimGrid that contain other assumptions."""
