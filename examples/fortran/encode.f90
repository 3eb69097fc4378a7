! SPDX-License-Identifier: Apache-2.0
!
! The program of examples/c/encode.c in Fortran: a file of raw 32-bit floats becomes a message, with the bytes of
! `gradwire encode --codec CODEC --dtype f32 --seed 1 --step 7 IN OUT`.
!
!   gfortran gradwire.f90 encode.f90 $(pkg-config --libs gradwire) -o encode
!   ./encode qsgd:bits=4 gradient.f32 gradient.gw
program encode
  use gradwire
  implicit none
  character(len=1000) :: codec, in, out
  real(c_float), allocatable, target :: values(:), back(:)
  integer(c_int8_t), allocatable :: message(:)
  type(c_ptr) :: plan
  integer(c_size_t) :: bytes, written
  integer(c_int64_t) :: file_bytes
  integer :: unit

  if (command_argument_count() /= 3) error stop 'usage: encode CODEC IN OUT'
  call get_command_argument(1, codec)
  call get_command_argument(2, in)
  call get_command_argument(3, out)
  open (newunit=unit, file=trim(in), access='stream', form='unformatted', status='old', action='read')
  inquire (unit=unit, size=file_bytes)
  allocate (values(file_bytes / 4), back(file_bytes / 4))
  read (unit) values
  close (unit)

  call check(gw_plan_open(trim(codec) // c_null_char, plan))
  call check(gw_plan_add(plan, c_null_char, GW_F32, size(values, kind=c_int64_t), 1_c_int))
  call check(gw_plan_fit(plan, [c_loc(values)]))
  call check(gw_plan_bytes(plan, bytes))
  allocate (message(bytes))
  call check(gw_encode(plan, [c_loc(values)], 7_c_int64_t, 1_c_int64_t, message, bytes, written))
  call check(gw_decode(plan, message, written, [c_loc(back)]))
  call gw_plan_close(plan)

  open (newunit=unit, file=trim(out), access='stream', form='unformatted', status='replace', action='write')
  write (unit) message
  close (unit)
  print '(2a, i0, a, i0, a, es9.2)', trim(codec), ': ', written, ' bytes for ', size(values), ' floats, error', &
    sum((real(values, c_double) - back)**2) / sum(real(values, c_double)**2)
end program
