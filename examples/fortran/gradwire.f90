! SPDX-License-Identifier: Apache-2.0
!
! The interfaces of gradwire.h for Fortran 2008, to be copied into a program. Texts end with c_null_char, and tensors are
! passed as lists of addresses, [c_loc(gradient)]. gw_reducer_open_mpi() takes the communicator as it is: an integer of
! `use mpi`, or comm%mpi_val of `use mpi_f08`.
module gradwire
  use, intrinsic :: iso_c_binding
  implicit none
  integer(c_int), parameter :: GW_OK = 0, GW_F32 = 0, GW_F16 = 1, GW_BF16 = 2

  interface
    function gw_error() bind(c) result(text)
      import :: c_ptr
      type(c_ptr) :: text
    end function
    function gw_plan_open(codec, plan) bind(c) result(status)
      import :: c_int, c_char, c_ptr
      character(kind=c_char), intent(in) :: codec(*)
      type(c_ptr), intent(out) :: plan
      integer(c_int) :: status
    end function
    subroutine gw_plan_close(plan) bind(c)
      import :: c_ptr
      type(c_ptr), value :: plan
    end subroutine
    function gw_plan_add(plan, name, dtype, count, dimensions) bind(c) result(status)
      import :: c_int, c_int64_t, c_char, c_ptr
      type(c_ptr), value :: plan
      character(kind=c_char), intent(in) :: name(*)
      integer(c_int), value :: dtype, dimensions
      integer(c_int64_t), value :: count
      integer(c_int) :: status
    end function
    function gw_plan_add_matrix(plan, name, dtype, rows, columns) bind(c) result(status)
      import :: c_int, c_int64_t, c_char, c_ptr
      type(c_ptr), value :: plan
      character(kind=c_char), intent(in) :: name(*)
      integer(c_int), value :: dtype
      integer(c_int64_t), value :: rows, columns
      integer(c_int) :: status
    end function
    function gw_plan_fit(plan, tensors) bind(c) result(status)
      import :: c_int, c_ptr
      type(c_ptr), value :: plan
      type(c_ptr), intent(in) :: tensors(*)
      integer(c_int) :: status
    end function
    function gw_plan_bytes(plan, bytes) bind(c) result(status)
      import :: c_int, c_size_t, c_ptr
      type(c_ptr), value :: plan
      integer(c_size_t), intent(out) :: bytes
      integer(c_int) :: status
    end function
    function gw_encode(plan, tensors, step, seed, message, room, written) bind(c) result(status)
      import :: c_int, c_int8_t, c_int64_t, c_size_t, c_ptr
      type(c_ptr), value :: plan
      type(c_ptr), intent(in) :: tensors(*)
      integer(c_int64_t), value :: step, seed
      integer(c_int8_t), intent(out) :: message(*)
      integer(c_size_t), value :: room
      integer(c_size_t), intent(out) :: written
      integer(c_int) :: status
    end function
    function gw_decode(plan, message, bytes, tensors) bind(c) result(status)
      import :: c_int, c_int8_t, c_size_t, c_ptr
      type(c_ptr), value :: plan
      integer(c_int8_t), intent(in) :: message(*)
      integer(c_size_t), value :: bytes
      type(c_ptr), intent(in) :: tensors(*)
      integer(c_int) :: status
    end function
    function gw_reducer_open_mpi(communicator, timeout, plan, reducer) bind(c) result(status)
      import :: c_int, c_double, c_ptr
      integer(c_int), value :: communicator
      real(c_double), value :: timeout
      type(c_ptr), value :: plan
      type(c_ptr), intent(out) :: reducer
      integer(c_int) :: status
    end function
    subroutine gw_reducer_close(reducer) bind(c)
      import :: c_ptr
      type(c_ptr), value :: reducer
    end subroutine
    function gw_reducer_set(reducer, option, value) bind(c) result(status)
      import :: c_int, c_char, c_ptr
      type(c_ptr), value :: reducer
      character(kind=c_char), intent(in) :: option(*), value(*)
      integer(c_int) :: status
    end function
    function gw_reducer_get(reducer, figure, value) bind(c) result(status)
      import :: c_int, c_int64_t, c_char, c_ptr
      type(c_ptr), value :: reducer
      character(kind=c_char), intent(in) :: figure(*)
      integer(c_int64_t), intent(out) :: value
      integer(c_int) :: status
    end function
    function gw_reducer_run(reducer, step, in, out) bind(c) result(status)
      import :: c_int, c_int64_t, c_ptr
      type(c_ptr), value :: reducer
      integer(c_int64_t), value :: step
      type(c_ptr), intent(in) :: in(*), out(*)
      integer(c_int) :: status
    end function
    function gw_reducer_save(reducer, path) bind(c) result(status)
      import :: c_int, c_char, c_ptr
      type(c_ptr), value :: reducer
      character(kind=c_char), intent(in) :: path(*)
      integer(c_int) :: status
    end function
    function gw_reducer_load(reducer, path) bind(c) result(status)
      import :: c_int, c_char, c_ptr
      type(c_ptr), value :: reducer
      character(kind=c_char), intent(in) :: path(*)
      integer(c_int) :: status
    end function
    function c_strlen(text) bind(c, name='strlen') result(length)
      import :: c_ptr, c_size_t
      type(c_ptr), value :: text
      integer(c_size_t) :: length
    end function
  end interface

contains

  ! Ends the program with the words of a failure.
  subroutine check(status)
    integer(c_int), intent(in) :: status
    character(kind=c_char), pointer :: text(:)
    if (status == GW_OK) return
    call c_f_pointer(gw_error(), text, [c_strlen(gw_error())])
    print *, 'gradwire: ', text
    error stop 1
  end subroutine
end module
